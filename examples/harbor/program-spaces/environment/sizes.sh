for file in $(ls $1); do
  echo $file:$(wc -l < $1/$file)
done
