#!/bin/bash
if [ -z "$(ls -A /app/inbox)" ] && [ "$(ls /app/txt)" = "$(printf '%s\n' notes.txt plan.txt)" ] && [ "$(ls /app/csv)" = sales.csv ] && [ "$(ls /app/md)" = read.me.md ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
