#!/bin/bash
python3 /app/oracle.py > /dev/null 2>&1 &
for _ in $(seq 50); do
  python3 -c "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:8200/17').read().decode())" > /app/answer.txt 2> /dev/null && break
  sleep 0.1
done
