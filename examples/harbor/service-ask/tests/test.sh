#!/bin/bash
wanted=$(python3 -I -c "import random; print(sum(random.Random(17).sample(range(1000), 20)))")
if [ "$(tr -d "[:space:]" < /app/answer.txt)" = "$wanted" ]
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
