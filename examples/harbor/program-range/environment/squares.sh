n=$1
for ((i = 1; i < n; i++)); do
  echo $((i * i))
done
