#!/bin/bash
grep -oE "[a-z]+@[a-z]+\.[a-z]+" /app/letters.txt | sort -u > /app/addresses.txt
