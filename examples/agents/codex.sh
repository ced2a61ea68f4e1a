#!/bin/sh
# Codex. It knows a model server by a provider in its settings; the key is in OPENAI_API_KEY.
question=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["input"])')
export HOME="${PALESTRA_CASE_FILE%/*}"
cd "$HOME" && codex exec --skip-git-repo-check -c model_provider=palestra -c model=gpt-5 \
  -c 'model_providers.palestra.name="palestra"' -c "model_providers.palestra.base_url=\"$OPENAI_BASE_URL\"" \
  -c 'model_providers.palestra.env_key="OPENAI_API_KEY"' -c 'model_providers.palestra.wire_api="responses"' \
  "$question" </dev/null
