#!/bin/sh
# Any program that can speak HTTP: here curl, without tools. The case is on stdin, the model at OPENAI_BASE_URL.
question=$(python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["input"]))')
curl --silent --fail "$OPENAI_BASE_URL/chat/completions" \
  --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
  --data "{\"model\": \"any\", \"messages\": [{\"role\": \"user\", \"content\": $question}]}"
