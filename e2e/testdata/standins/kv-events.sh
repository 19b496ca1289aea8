# Functions of the stand-ins, for engines that take --kv-events-config: $events is its JSON object.

# value prints the value of a key of the JSON object in $events, or nothing.
value() { "${STANDIN_PYTHON:-python3}" -c 'import json, sys; print(json.loads(sys.argv[1]).get(sys.argv[2], ""))' "$events" "$1"; }
# bound prints the port of an address such as tcp://*:5557, or 0 without one.
bound() {
	case $(value "$1") in
	"") echo 0 ;;
	"tcp://*:"*) value "$1" | sed 's/.*://' ;;
	*) die "$1 does not bind: $(value "$1")" ;;
	esac
}
