#!/bin/sh
# opencode. It knows a model server by a provider in opencode.json.
question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["input"])')
export HOME="${PALESTRA_CASE_FILE%/*}" OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1
cd "$HOME" && cat >opencode.json <<'END'
{"share": "disabled", "model": "palestra/any", "small_model": "palestra/any", "provider": {"palestra": {
  "npm": "@ai-sdk/openai-compatible", "models": {"any": {}},
  "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}}}}
END
opencode run "$question" </dev/null
