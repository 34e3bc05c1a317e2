#!/bin/bash
cd /app/tools
if [ -x greet ] && [ -x sum.py ] && [ ! -x words.txt ] && [ ! -x notes.sh ] && [ -f words.txt ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
