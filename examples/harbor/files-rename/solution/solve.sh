#!/bin/bash
cd /app/photos
for file in *.jpeg; do mv "$file" "${file%.jpeg}.jpg"; done
