#!/bin/bash
if [ "$(cat /app/addresses.txt)" = "$(printf '%s\n' ada@example.org bob@example.com cy@example.net)" ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
