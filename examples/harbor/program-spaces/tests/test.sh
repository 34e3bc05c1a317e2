#!/bin/bash
echo 0 > /logs/verifier/reward.txt
mkdir -p /tmp/sizes
printf "1\n2\n" > "/tmp/sizes/two lines.txt"
printf "1\n" > /tmp/sizes/one
if [ "$(timeout -k 1 5 bash /app/sizes.sh /tmp/sizes | head -c 1000)" = "$(printf '%s\n' one:1 "two lines.txt:2")" ]
then echo 1 > /logs/verifier/reward.txt
fi
