#!/bin/sh
# Makes three nodes on this machine and runs a command on the manager's: sh nodes.sh COMMAND...    (nodes.py enters them)
#
# A node is a network namespace with an address, a cable to one switch on the manager's, a name, a /dev/shm and a token file of
# its own. They share what real nodes do not: clock, cores, memory, process numbers, and every folder but /dev/shm.
set -e

own() { # NAME
  mount -t tmpfs none /dev/shm
  (umask 077 && echo "$token" > /dev/shm/token)
  printf '127.0.0.1 localhost\n10.71.0.1 manager\n10.71.0.2 engine\n10.71.0.3 trainer\n' > /dev/shm/hosts
  mount --bind /dev/shm/hosts /etc/hosts
  echo "$1" > /proc/sys/kernel/hostname
  ip link set lo up
}

connect() { # NAME ADDRESS PROCESS: `NAME` is the switch's end of the cable
  ip link add "$1" master switch type veth peer name eth0 netns "$3"
  ip link set "$1" up
  nsenter --target="$3" --net ip address add "$2/24" dev eth0
  nsenter --target="$3" --net ip link set eth0 up
}

hold() { # NAME ADDRESS: a node without a command, as long as ours lives; `held` is the process in it
  unshare --net --mount --uts sh "$0" --hold "$1" $$ &
  held=$!
  until grep -q tail "/proc/$held/comm"; do
    readlink "/proc/$held/ns/net" > /dev/null # not of one that has ended
    sleep 0.02
  done
  connect "$1" "$2" "$held"
}

case "$1" in
  --hold)
    own "$2"
    exec tail --pid="$3" -f /dev/null > /dev/null 2>&1 # no pipe of the command stays open
    ;;
  --inside) shift ;;
  *)
    token=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
    export token
    exec unshare --map-root-user --net --mount --uts sh "$0" --inside "$@"
    ;;
esac
own manager
ip link add switch type bridge
ip link set switch up
connect manager 10.71.0.1 $$
hold engine 10.71.0.2
engine=$held
hold trainer 10.71.0.3
unset token
R3DEMO_NODES="{\"manager\": [$$, \"10.71.0.1\"], \"engine\": [$engine, \"10.71.0.2\"], \"trainer\": [$held, \"10.71.0.3\"]}"
export R3DEMO_NODES
echo "nodes: $R3DEMO_NODES" >&2 # nsenter --target=NUMBER --user --net enters one
exec "$@"
