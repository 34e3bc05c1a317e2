#!/bin/bash
{ echo shop,total; tail -n +2 /app/sales.csv | awk -F, '{sum[$1] += $3} END {for (shop in sum) print shop "," sum[shop]}' | sort; } > /app/totals.csv
