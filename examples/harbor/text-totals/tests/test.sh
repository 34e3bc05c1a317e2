#!/bin/bash
if [ "$(tr -d "\r" < /app/totals.csv)" = "$(printf '%s\n' shop,total east,12 north,35 west,9)" ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
