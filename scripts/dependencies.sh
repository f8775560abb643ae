#!/bin/sh
# Installs the packages that a target of the Makefile needs, on Debian and Ubuntu, and nothing else.
#
#   scripts/dependencies.sh build|quickstart|sweep|check|test|lint|bench|simulate
#
# Before it installs, it says what is missing and why. If nothing is missing, it is quick and silent.
# On other systems it names what to install by hand, and ends without an error.
set -eu
purpose=${1:?usage: scripts/dependencies.sh build|quickstart|sweep|check|test|lint|bench|simulate}

# packages, and what each is for
build="gcc:C_compiler g++:links_the_C++_tokenizer_library make:builds pkg-config:finds_libraries
libc6-dev:C_library libopenmpi-dev:MPI_for_several_processes openmpi-bin:mpirun
libibverbs-dev:RDMA_networks libdnnl-dev:matrix_products_on_the_CPU(oneDNN) libjansson-dev:JSON
libxxhash-dev:checksums_of_checkpoints libsentencepiece-dev:tokenizer
libssl-dev:encrypts_packets(OpenSSL) libcurl4-openssl-dev:asks_etcd_who_takes_part"
case $(uname -m) in x86_64) ;; *) build=$(echo "$build" | sed 's/libdnnl-dev:[^ ]*/libopenblas-dev:matrix_products_on_the_CPU/') ;; esac
quickstart="$build bible-kjv:the_text_that_quickstart_trains_on sentencepiece:trains_a_tokenizer
python3:reads_logs python3-matplotlib:plots"
sweep="$quickstart python3-scipy:intervals_(Student's_t)"
lint="$build libcmocka-dev:C_unit_tests clang-tidy:finds_faults_in_C clang-format:formats_C"
check="$build libcmocka-dev:C_unit_tests clang-format:formats_C python3-pytest:runs_the_tests
python3-pytest-xdist:runs_several_at_once python3-numpy:references sentencepiece:trains_a_tokenizer
python3-sentencepiece:the_tokenizer_to_compare_with"
test="$sweep libcmocka-dev:C_unit_tests python3-pytest:runs_the_tests
python3-pytest-xdist:runs_several_at_once python3-numpy:references
python3-sentencepiece:the_tokenizer_to_compare_with
xxhash:checks_checksums_of_checkpoints python3-venv:transformers_in_a_virtual_environment
iproute2:network_namespaces nginx-light:a_web_service_beside_training nftables:loses_packets
ethtool:switches_off_segmentation etcd-server:knows_who_takes_part(etcd)
openssh-server:starts_ranks_on_hosts_of_tests_(the_system's_own_stays_off)
slurmctld:a_cluster_of_tests_(Slurm) slurmd:its_nodes slurm-client:starts_ranks_on_them
clang:makes_up_packets_and_files(libFuzzer) libclang-rt-dev:libFuzzer's_library
libns3-dev:simulates_a_network(ns-3)"
[ "$(uname -m)" != x86_64 ] ||
    test="$test qemu-system-x86:virtual_machine_with_RDMA_devices busybox-static:starts_it
gcc-aarch64-linux-gnu:compiles_for_another_processor g++-aarch64-linux-gnu:links_there
libc6-dev-arm64-cross:its_C_library qemu-user:runs_its_programs"
simulate="g++:C++_compiler make:builds libns3-dev:simulates_a_network(ns-3) python3-numpy:statistics
python3-matplotlib:plots"
bench="$test libopenblas0:another_BLAS_to_compare_with"

case $purpose in
build) wanted=$build ;; quickstart) wanted=$quickstart ;; sweep) wanted=$sweep ;; check) wanted=$check ;;
test) wanted=$test ;;
lint) wanted=$lint ;; bench) wanted=$bench ;;
simulate) wanted=$simulate ;;
*) echo "scripts/dependencies.sh: expected build, quickstart, sweep, check, test, lint, bench or simulate, got '$purpose'" >&2; exit 2 ;;
esac

if ! command -v apt-get >/dev/null 2>&1; then
    echo "No apt-get here. If the next step misses something, install the equivalents of:"
    for entry in $wanted; do echo "  ${entry%%:*}"; done
    exit 0
fi

missing=
for entry in $wanted; do
    package=${entry%%:*}
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $entry"
done
[ -n "$missing" ] || exit 0

echo "To $purpose, these packages of the distribution are missing and will be installed:"
names=
for entry in $missing; do
    printf '  %-22s %s\n' "${entry%%:*}" "$(echo "${entry#*:}" | tr _ ' ')"
    names="$names ${entry%%:*}"
done
sudo=
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
        echo "scripts/dependencies.sh: neither root nor sudo; run as root: apt-get install$names" >&2
        exit 1
    fi
    sudo=sudo
fi
case $names in *openssh-server*) # Debian does not start it where this file is
    $sudo mkdir -p /etc/ssh
    $sudo touch /etc/ssh/sshd_not_to_be_run
    echo "  (To have this machine's own SSH server, remove /etc/ssh/sshd_not_to_be_run.)" ;;
esac
log=$(mktemp)
if ! { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive \
       apt-get install -y --no-install-recommends $names; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "scripts/dependencies.sh: apt-get failed, see above; full output in $log" >&2
    exit 1
fi
rm -f "$log"
