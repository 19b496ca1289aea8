#!/bin/sh
# The OCI runtime for dockerd: runc, without the capabilities that this machine does not have. A privileged container
# requests all of them. If even root lacks one (CAP_SYS_RESOURCE, in many sandboxes), runc refuses the whole request.
# This script only removes capabilities from requests.
set -eu
bounding=0x$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
missing="" bit=0
for capability in CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE \
	NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT \
	SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG \
	WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE; do
	[ $((bounding >> bit & 1)) = 1 ] || missing="$missing,\"CAP_$capability\""
	bit=$((bit + 1))
done
# The requested capabilities are in a bundle's config.json (create, run) or in a file of the process (exec).
command="" bundle=. process="" before=""
for argument; do
	case $before in
	--bundle | -b) bundle=$argument ;;
	--process | -p) process=$argument ;;
	esac
	case $argument in
	create | run | exec) command=${command:-$argument} ;;
	--bundle=*) bundle=${argument#*=} ;;
	--process=*) process=${argument#*=} ;;
	esac
	before=$argument
done
case $command in
create | run) request=$bundle/config.json capabilities=.process.capabilities ;;
exec) request=$process capabilities=.capabilities ;;
*) request="" ;;
esac
if [ -n "$missing" ] && [ -f "$request" ]; then
	lesser=$(jq -c --argjson missing "[${missing#,}]" "if $capabilities then $capabilities[] |= ((. // []) - \$missing) else . end" "$request")
	printf '%s\n' "$lesser" >"$request"
fi
exec runc "$@"
