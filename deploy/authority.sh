#!/bin/sh
# The authority of a federation's certificates, with openssl. Keep FOLDER on a machine of its own, readable by you alone.
#
#     deploy/authority.sh create FOLDER HOST…   an authority (10 years) and the SuperLink's certificate (90 days)
#     deploy/authority.sh renew  FOLDER HOST…   a new key and certificate for the SuperLink, by the same authority
#     deploy/authority.sh revoke FOLDER HOST…   after a lost key: a new authority and certificate
#
# To the SuperLink: server.crt and server.key (certificates/ of the project). To the clients: ca.crt. Flower's clients read no
# revocation lists, so whoever revokes gives all clients the new ca.crt, which knows nothing of the lost one.
set -eu
umask 077
case "${1:-}" in create | renew | revoke) ;; *) sed -n '3,7p' "$0" >&2; exit 2 ;; esac
if [ $# -lt 3 ]; then echo "error: $1: found no FOLDER or no HOST; allowed: $1 FOLDER HOST…" >&2; exit 2; fi
what=$1 folder=$2
shift 2
if [ "$what" = create ] && [ -e "$folder/ca.key" ]; then
    echo "error: $folder/ca.key exists; allowed: renew, revoke, or another folder" >&2; exit 2
fi
if [ "$what" != create ] && [ ! -e "$folder/ca.key" ]; then
    echo "error: $folder/ca.key: no such file; allowed: a folder that create made" >&2; exit 2
fi
mkdir -p "$folder"
cd "$folder"
hosts=
for host in "$@"; do
    case "$host" in *:* | *[!0-9.]*) kind=DNS ;; *) kind=IP ;; esac
    case "$host" in *:*) kind=IP ;; esac
    hosts="$hosts${hosts:+,}$kind:$host"
done
if [ "$what" != renew ]; then
    if [ "$what" = revoke ]; then mv ca.crt "revoked-$(date -u +%Y%m%dT%H%M%S).crt"; fi
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -sha384 -nodes -days 3650 -subj "/CN=federation authority" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout ca.key -out ca.crt 2>/dev/null
fi
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -subj "/CN=SuperLink" -keyout server.key -out server.csr 2>/dev/null
printf '%s\n' "subjectAltName=$hosts" "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" \
    "subjectKeyIdentifier=hash" "authorityKeyIdentifier=keyid" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -sha384 -days 90 -extfile server.ext -out server.crt 2>/dev/null
rm -f server.csr server.ext
chmod 644 ca.crt server.crt
openssl verify -CAfile ca.crt server.crt >/dev/null
echo "$folder: $(openssl x509 -in server.crt -noout -enddate)"
