#!/bin/bash
echo 8123 > /app/port.txt
sed -i "s/Path(.*read_text()/int(&)/" /app/server.py
