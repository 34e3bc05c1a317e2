#!/bin/sh
# Pushes a scored group to the trajectory server and pulls it as a batch, with curl alone: any language can do the same.
#
#     sh examples/push_groups.sh                          # starts a server of its own in memory, and ends it
#     sh examples/push_groups.sh http://127.0.0.1:8000    # uses one that runs (`run-api`) and has no run going on
set -eu

folder=$(mktemp -d)
server=
trap 'if [ -n "$server" ]; then { kill "$server"; wait "$server"; } 2>/dev/null || true; fi; rm -rf "$folder"' EXIT
PATH="$(dirname "$0")/../.venv/bin:$PATH"

url=${1:-}
if [ -z "$url" ]; then
    run-api --store memory --port 0 >"$folder/log" 2>&1 &
    server=$!
    while [ -z "$url" ]; do
        kill -0 "$server" || { cat "$folder/log" >&2; exit 1; }
        sleep 0.1
        url=$(sed -n 's/.*running on \(http[^ ]*\).*/\1/p' "$folder/log")
    done
fi

call() { # METHOD PATH [JSON [HEADER]]: prints the answer, fails on any status but 2xx
    if [ $# -gt 2 ]; then
        curl --silent --show-error --fail-with-body --noproxy '*' --request "$1" "$url$2" \
            --header 'Content-Type: application/json' --header "${4:-Accept: application/json}" --data "$3"
    else
        curl --silent --show-error --fail-with-body --noproxy '*' --request "$1" "$url$2" \
            --header 'X-Trainer-Id: shell' --dump-header "$folder/headers"
    fi
    echo
}

echo "# the trainer registers and asks for its first batch; there is none yet"
call POST /register '{"wandb_group": "examples", "wandb_project": "curl", "batch_size": 2, "max_token_len": 64,
    "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1}'
call GET /batch

echo "# an environment registers; its number goes into every group"
call POST /register-env '{"desired_name": "shell", "group_size": 2, "max_token_length": 64, "weight": 1.0}' \
    | tee "$folder/env"
env_id=$(sed -n 's/.*"env_id": *\([0-9]*\).*/\1/p' "$folder/env")

echo "# it pushes two sequences of the same prompt (5 6): masks are -100 where nothing is learned"
group='{"env_id": '$env_id', "tokens": [[5, 6, 7], [5, 6, 8, 9]], "masks": [[-100, -100, 7], [-100, -100, 8, 9]],
    "scores": [1.0, 0.0], "inference_logprobs": [[1.0, 1.0, -0.7], [1.0, 1.0, -0.9, -0.2]]}'
call POST /scored_data "$group" "Idempotency-Key: $$-1"
echo "# sent again under the same key, as after a lost answer, it counts once"
call POST /scored_data "$group" "Idempotency-Key: $$-1"

echo "# the trainer gets it as a batch of two sequences, and says when it has learned from it"
call GET /batch
lease=$(tr -d '\r' <"$folder/headers" | sed -n 's/^[Xx]-[Ll]ease-[Ii]d: //p')
call POST /batch/ack "{\"lease_id\": \"$lease\"}"
call GET /status
