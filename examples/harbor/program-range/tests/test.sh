#!/bin/bash
if [ "$(bash /app/squares.sh 4)" = "$(printf '%s\n' 1 4 9 16)" ] && [ "$(bash /app/squares.sh 1)" = 1 ] && [ -z "$(bash /app/squares.sh 0)" ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
