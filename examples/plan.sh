#!/usr/bin/env bash
# Makes examples/plan.png, the upper part of a plan's page. It needs Chromium (or Chrome: CHROMIUM=google-chrome).
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
meshpar plan examples/llama.py:llama3_8b --topology v5p:4x4x8 --mesh "data=32, model=4" \
    --layout "batch: data; heads, kv_heads?, mlp, vocab: model; embed: data; seq: model" --html "$folder/plan.html" >/dev/null
"${CHROMIUM:-chromium}" --headless --no-sandbox --hide-scrollbars --user-data-dir="$folder/profile" \
    --window-size=1100,1190 --screenshot=examples/plan.png "file://$folder/plan.html" 2>/dev/null
