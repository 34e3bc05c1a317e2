#!/bin/bash
cd /app/inbox
for file in *; do mkdir -p "/app/${file##*.}"; mv "$file" "/app/${file##*.}/"; done
