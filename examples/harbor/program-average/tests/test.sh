#!/bin/bash
echo 0 > /logs/verifier/reward.txt
cd /app
if timeout 20 python3 -I /tests/check.py
then echo 1 > /logs/verifier/reward.txt
fi
