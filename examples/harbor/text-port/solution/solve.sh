#!/bin/bash
find /app/conf -name "*.conf" -exec sed -i "s/\b8080\b/9090/g" {} +
