#!/usr/bin/env bash
# A prompt of 1,500 tokens, through the router on port 8000: docs/examples/request.sh MODEL [N]
# The tokens are the ids from N on. Another N makes another prompt, which no prefix cache holds.
set -euo pipefail
first=${2:-1}
curl --silent --show-error --fail-with-body http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{
  "model": "'"$1"'", "prompt": ['"$(seq -s, "$first" $((first + 1499)))"'], "max_tokens": 16
}'
