# Boots a systemd of its own over a copy-on-write view of this machine, with our units, runs a script in it, and ends.
#   boot_systemd.sh VENV OUT UNITS SCRIPT
# VENV appears as /opt/stagewatch, OUT as /out. Needs namespaces of its own: mount, pid, ipc, uts, cgroup, net.
set -eu
venv=$1 out=$2 units=$3 script=$4
mount --make-rprivate /
scratch=$out/scratch && mkdir "$scratch" && mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch/up" "$scratch/work" "$scratch/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/up,workdir=$scratch/work" "$scratch/root"
root=$scratch/root
mount -t proc proc "$root/proc"
for each in run tmp var/tmp; do mount -t tmpfs tmpfs "$root/$each"; done
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for each in null zero full random urandom tty; do cp -a "/dev/$each" "$root/dev/"; done
mkdir "$root/dev/shm" "$root/dev/pts" "$root/dev/mqueue"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t devpts devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount --bind -o ro /sys "$root/sys"
mount -t cgroup2 none "$root/sys/fs/cgroup"
ip link set lo up
mkdir -p "$root/opt/stagewatch" "$root/out"
mount --bind "$venv" "$root/opt/stagewatch"
mount --bind "$out" "$root/out"
# Only what we bring: nothing of this machine's own services, timers or clean-ups.
rm -rf "$root/etc/systemd/system"
for each in sysinit local-fs basic sockets timers multi-user network-online paths; do
    rm -rf "$root/lib/systemd/system/$each.target.wants"
done
mkdir -p "$root/etc/systemd/system" "$root/etc/stagewatch" "$root/etc/sysusers.d" "$root/etc/tmpfiles.d"
cp "$units"/*.service "$root/etc/systemd/system/"
cp "$units/stagewatch.sysusers" "$root/etc/sysusers.d/stagewatch.conf"
cp "$units/stagewatch.tmpfiles" "$root/etc/tmpfiles.d/stagewatch.conf"
cp "$units"/*.env "$root/etc/stagewatch/"
sed -i 's#collector.example#127.0.0.1#' "$root/etc/stagewatch/agent.env"
for each in stagewatch-collector.service stagewatch-agent@.service; do
    mkdir "$root/etc/systemd/system/$each.d"
    printf '[Service]\nStandardOutput=append:/out/%s.log\nStandardError=append:/out/%s.log\n' "$each" "$each" \
        > "$root/etc/systemd/system/$each.d/log.conf"
done
cp "$script" "$root/run/script"
cat > "$root/etc/systemd/system/script.service" <<'UNIT'
[Unit]
After=basic.target
[Service]
Type=oneshot
ExecStart=/bin/bash /run/script
StandardOutput=file:/out/script.log
StandardError=file:/out/script.log
ExecStopPost=/bin/systemctl --no-block exit
UNIT
printf '[Unit]\nRequires=script.service basic.target\nAfter=script.service\n' > "$root/etc/systemd/system/script.target"
cd "$root" && mkdir oldroot && pivot_root . oldroot && umount -l /oldroot
mount --make-rshared /
exec env -i container=stagewatch PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=script.target \
    --log-target=null --show-status=0
