#!/bin/bash
echo 0 > /logs/verifier/reward.txt
python3 /app/server.py > /dev/null 2>&1 &
while [ $SECONDS -lt 10 ]; do
  answer=$(timeout 3 python3 -I -c "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8000/health', timeout=2).read(1000).decode().strip())" 2> /dev/null) && break
  kill -0 $! 2> /dev/null || break
  sleep 0.1
done
if [ "$answer" = "ok" ]
then echo 1 > /logs/verifier/reward.txt
fi
