#!/bin/bash
python3 /app/server.py > /dev/null 2>&1 &
for _ in $(seq 50); do
  answer=$(python3 -c "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8000/health').read().decode().strip())" 2> /dev/null) && break
  kill -0 $! 2> /dev/null || break
  sleep 0.1
done
if [ "$answer" = "ok" ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
