#!/bin/bash
cd /app/conf
if [ "$(cat web.conf)" = "$(printf 'port = 9090\ntimeout = 18080')" ] && [ "$(cat sub/api.conf)" = "listen 9090;" ] && [ "$(cat notes.txt)" = "8080 was the port" ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
