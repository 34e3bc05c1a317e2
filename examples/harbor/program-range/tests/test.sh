#!/bin/bash
echo 0 > /logs/verifier/reward.txt
squares() { timeout -k 1 5 bash /app/squares.sh "$1" | head -c 1000; }
if [ "$(squares 4)" = "$(printf '%s\n' 1 4 9 16)" ] && [ "$(squares 1)" = 1 ] && [ -z "$(squares 0)" ]
then echo 1 > /logs/verifier/reward.txt
fi
