#!/bin/bash
mkdir -p /app/restored
tar -xf /app/backup.tar -C /app/restored
find /app/restored -name "*.tmp" -delete
