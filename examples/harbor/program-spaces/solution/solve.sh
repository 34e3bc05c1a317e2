#!/bin/bash
cat > /app/sizes.sh <<"END"
for file in "$1"/*; do
  echo "$(basename "$file"):$(wc -l < "$file" | tr -d " ")"
done
END
