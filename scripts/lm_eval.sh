#!/bin/sh
# Runs lm-evaluation-harness on a checkpoint: HellaSwag, ARC, PIQA and its
# hundreds of other tasks.
#
#   scripts/lm_eval.sh MODEL --tasks hellaswag,arc_easy [OPTION...]
#
# MODEL is a Hugging Face Llama directory or a checkpoint, with tokenizer.model.
# All options are those of lm_eval (--limit 100, --num_fewshot 5, --batch_size
# 8, --device cuda, --output_path FILE, ...). The first call installs lm_eval,
# transformers and PyTorch from PyPI (7 GB) in a virtual environment of its own,
# build/venv-lm-eval or LM_EVAL_VENV. The questions of a task come from
# huggingface.co when the task is first used, and are kept.
set -eu
case ${1-} in
-h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
esac
fail() { echo "lm_eval.sh: $1" >&2; exit "${2-1}"; }
usage="usage: scripts/lm_eval.sh MODEL --tasks NAME,NAME... [OPTION of lm_eval]..."
[ $# -ge 2 ] || fail "$usage" 2

here=$(cd "$(dirname "$0")/.." && pwd)
venv=${LM_EVAL_VENV:-$here/build/venv-lm-eval}
requirements=$here/scripts/requirements-lm-eval.txt
model=$1
shift
case " $* " in
*" --tasks"*) ;;
*) fail "$usage" 2 ;;
esac
[ -f "$model/config.json" ] || fail "'$model' is no model directory: it has no config.json"
[ -f "$model/tokenizer.model" ] || [ -f "$model/tokenizer.json" ] ||
    fail "'$model' has no tokenizer.model: copy the one that made the token files there"

if ! cmp -s "$requirements" "$venv/requirements.txt"; then
    echo "lm_eval.sh: installing lm_eval in $venv" >&2
    "${PYTHON:-python3}" -m venv "$venv" || fail "cannot make the virtual environment $venv (python3-venv?)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" ||
        fail "cannot install lm_eval from PyPI, see above"
    cp "$requirements" "$venv/requirements.txt"
fi
if [ -f "$model/tokenizer.model" ] && [ ! -f "$model/tokenizer_config.json" ]; then
    # Without this file transformers leaves out <s> and the space before the first word. The model stays as it is.
    view=$(mktemp -d)
    trap 'rm -rf "$view"' EXIT
    trap 'exit 1' HUP INT TERM
    ln -s "$(cd "$model" && pwd)"/* "$view"
    echo '{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}' >"$view/tokenizer_config.json"
    model=$view
fi
status=0
"$venv/bin/python" -m lm_eval --model hf --model_args "pretrained=$model,dtype=float32,add_bos_token=True" "$@" || status=$?
[ $status -eq 0 ] ||
    fail "lm_eval failed, see above. Where huggingface.co cannot be reached, a task works only if its \
questions were fetched before (HF_HUB_OFFLINE=1 says so to lm_eval)"
