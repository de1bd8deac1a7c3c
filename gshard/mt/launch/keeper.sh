# Read by /bin/sh; $1: the seconds that a child has to stop by itself.
trap '' HUP INT TERM
read -r group || exit 0
read -r word && exit 0
kill -s TERM -- "-$group"
second=0
while [ $second -lt "$1" ]; do
    sleep 1
    kill -s 0 -- "-$group" || exit 0
    second=$((second + 1))
done
kill -s KILL -- "-$group"
