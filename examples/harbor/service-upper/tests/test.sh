#!/bin/bash
python3 /app/upper.py > /dev/null 2>&1 &
if python3 /tests/check.py
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
