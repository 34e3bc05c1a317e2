#!/bin/bash
echo 0 > /logs/verifier/reward.txt
python3 /app/upper.py > /dev/null 2>&1 &
if timeout 10 python3 -I /tests/check.py
then echo 1 > /logs/verifier/reward.txt
fi
