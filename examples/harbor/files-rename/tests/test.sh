#!/bin/bash
if [ "$(cd /app/photos && ls)" = "$(printf '%s\n' beach.jpg cat.jpg dog.png tree.jpg)" ] && grep -q beach /app/photos/beach.jpg
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
