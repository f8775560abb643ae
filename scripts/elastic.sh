#!/bin/bash
# Trains with ranks that may die and join while the others go on (--meet;
# llmc/membership).
#
#   elastic.sh -n 4 -- --model 15M --train train.bin --out out/run \
#              --save-every 500 --resume auto
#
#   -n N               processes [1]
#   --max-restarts N   how often each process is restarted after a signal or exit
#                      code 1 [3]
#   --meet URL         etcd://HOST:PORT/RUN, an etcd that runs already [an etcd
#                      that this script starts on this host and ends with the
#                      run; with --hosts and --srun it has a password, which the
#                      ranks get through their connections]
#   --hosts A,B,...    the processes run on these hosts in turn, over ssh; the
#                      hosts share this folder and need a login without a
#                      password [this host, without ssh]
#   --srun             the processes run on the nodes of this allocation of Slurm
#                      in turn, by srun: salloc --no-kill -N 2 scripts/elastic.sh
#                      --srun -n 4 -- OPTION...
#   -- OPTION...       options of train_llama2; --workers counts the workers of
#                      all N processes
#
# The same command with the --meet URL of a run that goes on adds N processes to
# it.
#
# SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU are passed on, and after
# them no process is started again. If the connection to a process ends, the
# process is killed and another one is started. If this script is killed, its
# processes on this host stop with a checkpoint, and those on other hosts are
# killed. If all processes die at
# once, the new ones continue from the last checkpoint (--resume auto). They do
# not with --srun or after a connection has ended, because a process there may
# still be training. Exit codes: 0: a process has ended well; 1: no process is
# left; 2: wrong usage. The environment variable TRAIN_LLAMA2 names the program
# [build/train_llama2], TRAIN_LLAMA2_STORE_PASSWORD has the password of user root
# of the etcd that --meet names.
set -u -o pipefail

say() { echo "elastic.sh: $1" >&2; }
fail() { say "$1"; exit "${2-1}"; }
usage() { sed -n '2,/^set -u/{/^set -u/d;s/^# \{0,1\}//;p}' "$0"; exit 0; }

# ---- options --------------------------------------------------------------------------------
ranks=1 most=3 meet='' hosts=() srun=''
count() { # count OPTION VALUE
    case $2 in *[!0-9]* | 0?*) fail "$1: expected a whole number, got '$2'" 2 ;; esac
    [ "${#2}" -lt 6 ] || fail "$1: expected at most 99999, got '$2'" 2
}
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage ;;
    --) shift; break ;;
    --srun) srun=yes; shift ;;
    -n | --max-restarts | --meet | --hosts)
        [ -n "${2-}" ] || fail "$1: expected a value" 2
        case $1 in
        -n) count "$1" "$2"; ranks=$2 ;;
        --max-restarts) count "$1" "$2"; most=$2 ;;
        --meet) meet=$2 ;;
        --hosts) IFS=, read -r -a hosts <<<"$2" ;;
        esac
        shift 2 ;;
    *) fail "unknown option '$1'; options of train_llama2 stand behind --" 2 ;;
    esac
done
[ "$ranks" -gt 0 ] || fail "-n: expected at least 1" 2
program=${TRAIN_LLAMA2:-build/train_llama2}
if [ -n "$srun" ]; then
    [ "${#hosts[@]}" -eq 0 ] || fail "--srun: expected no --hosts, Slurm says them" 2
    [ -n "${SLURM_JOB_NODELIST-}" ] || fail "--srun: expected an allocation of Slurm (salloc, sbatch)" 2
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    [ "${#hosts[@]}" -gt 0 ] || fail "--srun: scontrol does not say the allocation's nodes"
fi
[ "${#hosts[@]}" -gt 0 ] || [ -x "$program" ] || fail "no $program; run make first" 2
for host in ${hosts[@]+"${hosts[@]}"}; do
    case $host in '' | -*) fail "--hosts: expected names with commas between, got '$host'" 2 ;; esac
done

# ---- etcd -----------------------------------------------------------------------------------
# The ports that etcd of this script may take: those of --port-range, if the options have one.
first=20000 last=31999 word=''
for next in "$@"; do
    [ "$word" != --port-range ] || next=$word=$next
    word=$next
    [[ ! $next =~ ^--port-range=([0-9]{1,5})-([0-9]{1,5})$ ]] || first=${BASH_REMATCH[1]} last=${BASH_REMATCH[2]}
done
[ "$first" -le "$last" ] || first=$last # the trainer refuses it
folder=$(mktemp -d) || exit 1
password=${TRAIN_LLAMA2_STORE_PASSWORD-} # of the store; empty: it has none
name=elastic-${folder##*.} # of the etcd and of the run, unlike any other
etcd='' client='' peer=''
exec {idle}<> <(:) # nothing ever comes from it

doze() { read -r -t "$1" -u "$idle"; } # a signal ends it, other than sleep

launch() { # in a process group of its own, which Ctrl-C does not reach
    set -m
    "$@" &
    set +m
}

# A process of this host gets the signal if this script is killed.
tied=()
setpriv --pdeathsig TERM true 2>/dev/null && tied=(setpriv --pdeathsig)
tie() { # tie SIGNAL COMMAND
    launch ${tied[@]+"${tied[@]}" "$1"} "${@:2}"
}

etcd_start() {
    tie KILL etcd --name "$name" --data-dir "$folder/data" --listen-client-urls "http://$listens:$client" \
        --advertise-client-urls "http://$here:$client" --listen-peer-urls "http://127.0.0.1:$peer" \
        --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
        --initial-cluster "$name=http://127.0.0.1:$peer" </dev/null >>"$folder/log" 2>&1
    etcd=$!
}

# Prints what the store answers. Nothing: no answer within `patience` seconds.
token='' patience=2
ask() { # ask HOST PORT PATH JSON
    # shellcheck disable=SC2016  # the other shell expands it
    TOKEN=$token timeout "$patience" bash -c 'exec 3<>"/dev/tcp/$0/$1" &&
        printf "POST /v3/%s HTTP/1.0\r\n%sContent-Length: %d\r\n\r\n%s" "$2" "${TOKEN:+Authorization: $TOKEN
}" \
            "${#3}" "$3" >&3 && cat <&3' "$@" 2>/dev/null
}

# A token for further requests, if the store has a password.
log_in() { # log_in HOST PORT
    token=''
    [ -z "$password" ] ||
        [[ ! $(ask "$1" "$2" auth/authenticate "{\"name\":\"root\",\"password\":\"$password\"}") \
            =~ \"token\":\"([^\"]+)\" ]] || token=${BASH_REMATCH[1]}
}

# Gives the etcd of this script a password, while it listens on this host alone.
protect() {
    password=$(head -c 24 /dev/urandom | base64 -w 0 | tr '+/' 'AB')
    local what patience=60 # on a busy machine a password takes its time, and a second request would be refused
    while read -r what; do
        [[ $(ask 127.0.0.1 "$client" "auth/${what%% *}" "${what#* }") == *" 200 OK"* ]] ||
            fail "etcd takes no password (${what%% *}); see $folder/log"
    done <<END
role/add {"name":"root"}
user/add {"name":"root","password":"$password"}
user/grant {"user":"root","role":"root"}
enable {}
END
    { kill -KILL "$etcd" && wait "$etcd"; } 2>/dev/null
    listens=0.0.0.0
    etcd_start
    until etcd_answers || ! kill -0 "$etcd" 2>/dev/null; do doze 0.1; done
}

# Whether the etcd of this script answers. Another one may have had its port before.
etcd_answers() { [[ $(ask 127.0.0.1 "$client" cluster/member/list '{}') == *"\"name\":\"$name\""* ]]; }

# Starts etcd at ports that nobody uses. It tries random ports until etcd answers.
etcd_open() {
    command -v etcd >/dev/null ||
        fail "no etcd here: scripts/dependencies.sh elastic installs it; or name one with --meet"
    local attempts wait
    for ((attempts = 8; attempts > 0; attempts--)); do
        client=$((first + RANDOM % (last - first + 1))) peer=$((20000 + RANDOM % 12000))
        rm -rf "$folder/data"
        listens=127.0.0.1
        etcd_start
        for ((wait = 0; wait < 600; wait++)); do
            kill -0 "$etcd" 2>/dev/null || break
            if etcd_answers; then
                [ "${#hosts[@]}" -eq 0 ] || protect
                meet=etcd://$here:$client/$name
                return
            fi
            doze 0.1
        done
        kill -KILL "$etcd" 2>/dev/null
    done
    tail -n 3 "$folder/log" >&2
    fail "etcd does not start, see above"
}

# ---- processes ------------------------------------------------------------------------------
# Indexed by the number of a process: its process id, how often it was started again, when it is to be
# started (in seconds), its exit code, and the file descriptor that signals for it are written to.
pids=() again=() due=() ended=() inputs=() named=()
stopping='' stopped=0 unsure=''

# Runs on the other host. It reads the store's password, and then names of signals from its standard input, one a line, and sends them
# to the program. When the input ends, the connection is gone and another process takes the place of this
# one. So the program is killed with SIGKILL, since SIGTERM would end the run for all ranks.
# shellcheck disable=SC2016  # the other host's shell expands it
far_away='exec 3<&0
read -r TRAIN_LLAMA2_STORE_PASSWORD <&3
export TRAIN_LLAMA2_STORE_PASSWORD
"$@" </dev/null & program=$!
{ while read -r signal <&3; do kill -s "$signal" "$program"; done; kill -s KILL "$program"; } 2>/dev/null &
wait "$program"; code=$?
kill $! 2>/dev/null
exit "$code"'

remote() { # remote NUMBER COMMAND: over a connection that nothing else holds open
    local fd host=${hosts[$1 % ${#hosts[@]}]}
    for fd in "${inputs[@]}"; do exec {fd}>&-; done
    [ -z "$srun" ] || exec srun --no-kill --overlap --mpi=none --cpu-bind=none -N 1 -n 1 -w "$host" \
        sh -c "$2" <"$folder/input.$1"
    # ssh gives up after 15 s without an answer from the host.
    exec ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=5 \
        "$host" "$2" <"$folder/input.$1"
}

quoted() { printf "'%s'" "${1//\'/\'\\\'\'}"; } # for any shell

start() { # start NUMBER
    local options=(--meet "$meet" --meet-ranks "$ranks" --meet-process "$1" "${arguments[@]}")
    # A new process may take it that ranks which are not registered any more are dead, as they are
    # processes of this script. After a connection has ended, this is not sure.
    [ "${again[$1]}" -eq 0 ] || [ -n "$unsure" ] || options+=(--meet-anew)
    if [ "${#hosts[@]}" -eq 0 ]; then
        tie TERM "$program" "${options[@]}" </dev/null
    else
        local input word command='sh -c'
        for word in "$far_away" elastic "$program" "${options[@]}"; do
            command+=" $(quoted "$word")"
        done
        mkfifo "$folder/input.$1" 2>/dev/null
        exec {input}<>"$folder/input.$1"
        inputs[$1]=$input
        echo "$password" >&"$input"
        launch remote "$1" "cd $(quoted "$PWD") && $command"
    fi
    pids[$1]=$!
}

# Passes a signal on, and after that nothing is started again. A background program of a shell ignores
# SIGINT, so other hosts get SIGTERM for the first SIGINT. If another SIGINT comes more than a second
# later, they get SIGKILL: a second SIGINT also ends a trainer on this host at once.
stop() {
    local i far=$1
    if [ "$1" = INT ]; then
        far=TERM
        [ -z "$stopping" ] || [ "$SECONDS" -le $((stopped + 1)) ] || far=KILL
    fi
    [ -n "$stopping" ] || stopped=$SECONDS
    stopping=$1
    for i in "${!pids[@]}"; do
        if [ "${#hosts[@]}" -eq 0 ]; then kill -s "$1" "${pids[$i]}" 2>/dev/null
        else echo "$far" >&"${inputs[$i]}"; fi
    done
}
for signal in INT TERM HUP USR1 USR2 XCPU; do
    # shellcheck disable=SC2064  # with this name
    trap "stop $signal" "$signal"
done

# Sets `rank` to " (rank R)": the rank that a process had in the last view with it. It is empty where the process
# was in no view since its start, or where the store does not answer. `named` has the registrations that this
# function has found before. The store keeps earlier views, since other ranks may have made the next one already.
rank_of() { # rank_of NUMBER
    local url=${meet#etcd://} key answer member revision='' at uid views
    local run=${url#*/} host=${url%%/*}
    key=$(printf %s "$run/view" | base64 -w 0)
    rank=''
    log_in "$(tr -d '[]' <<<"${host%:*}")" "${host##*:}"
    for ((views = 0; views < 5; views++)); do
        answer=$(ask "$(tr -d '[]' <<<"${host%:*}")" "${host##*:}" kv/range "{\"key\":\"$key\"$revision}")
        [[ $answer =~ \"mod_revision\":\"([0-9]+)\" ]] || return
        revision=",\"revision\":$((BASH_REMATCH[1] - 1))"
        [[ $answer =~ \"value\":\"([^\"]+)\" ]] || return
        at=0
        while read -r member; do
            if [[ $member == *"\"process\":$1,"* && $member =~ \"uid\":\"([^\"]+)\" ]]; then
                uid=${BASH_REMATCH[1]}
                [ "$uid" = "${named[$1]-}" ] || rank=" (rank $at)"
                named[$1]=$uid
                return
            fi
            at=$((at + 1))
        done < <(base64 -d <<<"${BASH_REMATCH[1]}" | tr '}' '\n')
    done
}

# Starts process 0 alone until it stands in the store of this script, but not for longer than 2 s: if it finds
# its options or files wrong before, all others would find the same, and the script ends.
start_first() {
    local wait code all
    all="{\"key\":\"$(printf %s "$name/" | base64)\",\"range_end\":\"$(printf %s "${name}0" | base64)\"}"
    start 0
    for ((wait = 0; wait < 20; wait++)); do
        # Bash itself says here that a process was killed.
        if { [[ $(ask 127.0.0.1 "$client" kv/range "$all") == *'"count"'* ]]; } 2>/dev/null; then return; fi
        if ! kill -0 "${pids[0]}" 2>/dev/null; then
            wait "${pids[0]}" 2>/dev/null
            code=$?
            [ "$code" -ne 1 ] && [ "$code" -ne 2 ] || exit "$code"
            return
        fi
        doze 0.1
    done
}

# Handles a process that has ended: decides whether it is started again, and when.
settle() { # settle NUMBER
    local i=$1 code how input
    wait "${pids[$i]}" 2>/dev/null
    code=$?
    unset "pids[$i]"
    if [ -n "${inputs[$i]-}" ]; then
        input=${inputs[$i]}
        exec {input}>&-
        unset "inputs[$i]"
    fi
    how="ended with exit code $code"
    [ "$code" -le 128 ] || how="was killed by signal $((code - 128))"
    rank_of "$i"
    if [ "${#hosts[@]}" -gt 0 ]; then
        how="$how on ${hosts[$i % ${#hosts[@]}]}"
        # If the connection has ended (code 255 of ssh), the process may still run. srun has no such code.
        if [ "$code" -eq 255 ] || [ -n "$srun" ]; then unsure=yes; fi
        [ "$code" -ne 255 ] || [ -n "$srun" ] || how="has no connection to ${hosts[$i % ${#hosts[@]}]} (ssh)"
    fi
    if [ -n "$stopping" ] || [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then
        ended[i]=$code
    elif [ "${again[$i]}" -ge "$most" ]; then
        ended[i]=$code
        say "process $i$rank $how, for the last time (--max-restarts $most)"
    else
        again[i]=$((again[i] + 1))
        due[i]=$((SECONDS + again[i]))
        say "process $i$rank $how: start ${again[$i]} of $most"
    fi
}

close() {
    [ -z "$etcd" ] || { kill -KILL "$etcd" && wait "$etcd"; } 2>/dev/null
    rm -rf "$folder"
}
trap close EXIT

# ---- the run --------------------------------------------------------------------------------
arguments=("$@") here=127.0.0.1
[ "${#hosts[@]}" -eq 0 ] || read -r here _ < <(hostname -I)
[ -n "$meet" ] || etcd_open
for ((i = 0; i < ranks; i++)); do again[i]=0 due[i]=0; done
[ -z "$etcd" ] || [ "${#hosts[@]}" -gt 0 ] || start_first
while [ "${#ended[@]}" -lt "$ranks" ]; do
    for ((i = 0; i < ranks; i++)); do
        if [ -n "${ended[$i]-}" ]; then continue
        elif [ -z "${pids[$i]-}" ] && [ -n "$stopping" ]; then ended[i]=1
        elif [ -z "${pids[$i]-}" ] && [ "$SECONDS" -ge "${due[$i]}" ]; then start "$i"
        elif [ -n "${pids[$i]-}" ] && ! kill -0 "${pids[$i]}" 2>/dev/null; then settle "$i"; fi
    done
    if [ -n "$etcd" ] && ! kill -0 "$etcd" 2>/dev/null; then etcd_start; fi
    doze 0.2
done
for code in 0 2; do
    for one in "${ended[@]}"; do [ "$one" -ne "$code" ] || exit "$code"; done
done
[ -z "$stopping" ] || exit "${ended[0]}"
fail "no process is left: each has died $((most + 1)) times (--max-restarts $most)"
