# In the booted system: the steps of docs/deploy.md, an engine's ring, and what came of it. Each finding is a line.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
python=/opt/stagewatch/bin/python
wait_for() { for _ in $(seq 200); do "$@" >/dev/null 2>&1 && return; sleep 0.2; done; echo "never: $*"; }
get() { $python -c 'import sys, urllib.request as u
r = u.Request("http://127.0.0.1:8765" + sys.argv[1], headers={"Authorization": "Bearer " + open("/etc/stagewatch/operator.token").read().strip()})
print(u.urlopen(r, timeout=5).read().decode())' "$1"; }
systemd-sysusers
systemd-tmpfiles --create /etc/tmpfiles.d/stagewatch.conf
(umask 077; cd /etc/stagewatch
 /opt/stagewatch/bin/stagewatch token --token-file tokens --scopes ingest sidecars > ingest.token
 /opt/stagewatch/bin/stagewatch token --token-file tokens --scopes read,admin operator > operator.token
 od -An -N16 -tx1 /dev/urandom | tr -d ' \n' > digest.key)
systemctl daemon-reload
systemctl start stagewatch-collector stagewatch-agent@vllm
wait_for get /readyz
wait_for test -e /run/stagewatch-agent-vllm/alive
for unit in stagewatch-collector stagewatch-agent@vllm; do
    pid=$(systemctl show -p MainPID --value $unit)
    echo "$unit: $(systemctl is-active $unit) $(grep -E '^(Seccomp|NoNewPrivs|CapBnd):' "/proc/$pid/status" | tr -d '\t' | tr '\n' ' ')"
done
STAGEWATCH_HEALTH_FILE=/run/stagewatch-agent-vllm/alive runuser -u vllm -- /opt/stagewatch/bin/stagewatch-agent health
cat > /run/engine.py <<'ENGINE'
import sys
sys.path.insert(0, "/out")
from pathlib import Path
from service_records import append_steps, identity
from stagewatch.agents.ring import RingWriter
append_steps(RingWriter(Path("/dev/shm/stagewatch"), identity(), 1 << 20), 5)
ENGINE
chmod 644 /run/engine.py
runuser -u vllm -- $python /run/engine.py
shipped() { get /v1/engines | grep -q '"instance":"life-1"'; }
wait_for shipped && shipped && echo "shipped"
systemctl stop stagewatch-agent@vllm stagewatch-collector
for unit in stagewatch-collector stagewatch-agent@vllm; do
    echo "$unit: $(systemctl show -p Result -p ExecMainStatus --value $unit | tr '\n' ' ')"
done
ls /dev/shm/stagewatch
