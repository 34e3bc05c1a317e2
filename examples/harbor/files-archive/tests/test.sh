#!/bin/bash
cd /app
if [ -f backup.tar ] && [ "$(cat restored/letter.txt)" = dear ] && [ -f restored/deep/list.txt ] && [ -z "$(find restored -name '*.tmp')" ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
