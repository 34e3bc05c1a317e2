#!/bin/bash
cd /app/tools
for file in *; do [ "$(head -c 2 "$file")" = "#!" ] && chmod +x "$file"; done
true
