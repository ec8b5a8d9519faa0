# Runs a command as a container would: root file system read-only, a user without name or rights, only what it is given.
#   readonly_root.sh VENV WORK UID:GID COMMAND...
# VENV appears as /opt/stagewatch, WORK as /run/work, which is all that can be written. Needs a mount namespace of its own.
set -eu
venv=$1 work=$2 uid=${3%:*} gid=${3#*:}
shift 3
mount --make-rprivate /
mount -t tmpfs tmpfs /opt && mkdir /opt/stagewatch && mount --bind "$venv" /opt/stagewatch
mount -o remount,ro /opt
mount -o remount,bind,ro /opt/stagewatch
mount -t tmpfs tmpfs /run && mkdir /run/work && mount --bind "$work" /run/work
mount -t tmpfs -o ro tmpfs /tmp
mount -t tmpfs -o ro tmpfs /dev/shm
mount -o remount,bind,ro /
exec setpriv --reuid "$uid" --regid "$gid" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
