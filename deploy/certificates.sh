#!/bin/sh
# Makes an authority, and a certificate for the NATS nodes:   deploy/certificates.sh FOLDER [NAME ...]
#
# The certificate is valid for the names, by default those of compose.yaml, and for this machine. FOLDER/nodes is for
# the nodes; of it clients need ca.pem (tls_ca in the address). FOLDER/ca-key.pem makes further certificates: keep it
# elsewhere, or nowhere.
set -eu
folder=$1
shift
[ $# -gt 0 ] || set -- nats-1 nats-2 nats-3
umask 077
mkdir "$folder" "$folder/nodes"
cd "$folder/nodes"

names="DNS:localhost,IP:127.0.0.1"
for name in "$@"; do names="$names,DNS:$name"; done
days=3650

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days $days -subj "/CN=readergroup authority" \
    -addext keyUsage=critical,keyCertSign,cRLSign -keyout ../ca-key.pem -out ca.pem
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=readergroup node" \
    -keyout node-key.pem -out ../node.csr
# A node is a server to clients and to other nodes, and a client of these.
printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n' "$names" >../node.ext
printf 'subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n' >>../node.ext  # Python 3.13 and newer refuse others
openssl x509 -req -in ../node.csr -CA ca.pem -CAkey ../ca-key.pem -set_serial 1 -days $days -extfile ../node.ext \
    -out node.pem
rm ../node.csr ../node.ext
chmod 644 ca.pem node.pem
