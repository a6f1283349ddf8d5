//! What one message costs: a request from its body to the bytes that are sent, and a reply from its bytes to its body, in both
//! versions of the protocol. Replies of nodes are never signed; a request is, except in version 1 without security.
//!
//! `cargo bench --bench message` prints microseconds. Behind `--`, the number of a row and a count run that row so often and
//! print nothing, for a tool that counts instructions: `-- 0 10000`.

#![expect(clippy::print_stdout, reason = "the figures are what it is for")]
#![expect(clippy::unwrap_used, reason = "what is measured works, or there is nothing to measure")]

mod measure;

use std::hint::black_box;
use std::sync::Arc;

use choria_provisioner::jwt::client::Credentials;
use choria_provisioner::pki::x509;
use choria_provisioner::protocol::subject::{ReplySubjects, Subject};
use choria_provisioner::protocol::{Codec, Identity, Request, RequestId, Sender, v1, v2};
use choria_provisioner::rpc::actions::{Body, Call, Configure, Jwt};
use measure::{nanos, recorded, vector};

/// A time at which all recorded keys and tokens are valid.
const NOW: i64 = 1_795_996_000;

fn main() {
    let sender = Sender {
        identity: Identity::parse("provisioner.example.net").unwrap(),
        caller: "choria=provisioner.example.net".to_owned(),
    };
    let certificate = vector("x509/prov.pem");
    let x509 = x509::Signer::new(certificate, &vector("x509/prov-key.pem")).unwrap();
    let credentials =
        Credentials::check(&vector("issuer/signer.jwt"), &vector("issuer/signer.seed"), NOW)
            .unwrap();
    let signer = v2::Signer::new(credentials.token(), credentials.key().clone());
    let codecs = [
        ("v1, not signed", "insecure", Codec::V1(v1::Codec::insecure(sender.clone()))),
        (
            "v1, x509",
            "x509",
            Codec::V1(v1::Codec::new(sender.clone(), v1::Signer::X509(Arc::new(x509)))),
        ),
        ("v2, Ed25519", "issuer", Codec::V2(v2::Codec::new(sender.clone(), signer))),
    ];

    let jwt = Jwt { token: "s3cret" }.body();
    let config = format!(r#"{{"plugin.choria.middleware_hosts":"{}"}}"#, "b".repeat(1_000));
    let empty = Default::default();
    let configure = Configure {
        action_policies: &empty,
        ca: "",
        certificate: "",
        config: &config,
        ecdh_public: "",
        key: "",
        opa_policies: &empty,
        server_jwt: "",
        ssldir: "",
        token: "s3cret",
    }
    .body();
    let reply_to = ReplySubjects::new(&sender.caller, RequestId::random().as_str()).unwrap();
    let mut rows: Vec<Row<'_>> = Vec::new();
    for (name, folder, codec) in &codecs {
        for (what, body) in [("jwt", &jwt), ("configure", &configure)] {
            let id = codec.request_id(NOW, [7; 16]);
            let subject = reply_to.for_request(id);
            let encode = move || encode(codec, id, body, &subject);
            let bytes = encode().len();
            rows.push(Row {
                name: format!("{name}: write {what}"),
                bytes,
                call: Box::new(move || drop(black_box(encode()))),
            });
        }
        // An answer to `restart`; one with a CSR, or with a JWT where there are no CSRs.
        for (what, longer_than) in [("a short reply", 700), ("a long reply", 2_000)] {
            let payload = recorded(folder, "provisioning.reply.", longer_than);
            let bytes = payload.len();
            rows.push(Row {
                name: format!("{name}: read {what}"),
                bytes,
                call: Box::new(move || {
                    let reply = codec.decode_reply(black_box(payload.as_bytes())).unwrap();
                    black_box(Body::parse(&reply.body).unwrap());
                }),
            });
        }
    }

    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    if let [row, count] = arguments.as_slice() {
        let call = &rows[row.parse::<usize>().unwrap()].call;
        for _ in 0..count.parse().unwrap() {
            call();
        }
        return;
    }
    println!("{:<34} {:>8} {:>12}", "one message", "bytes", "µs");
    for Row { name, bytes, call } in &rows {
        println!("{name:<34} {bytes:>8} {:>12.2}", nanos(call) / 1e3);
    }
}

/// What is measured.
struct Row<'a> {
    name: String,
    /// Of the message.
    bytes: usize,
    call: Box<dyn Fn() + 'a>,
}

fn encode(codec: &Codec, id: RequestId, body: &str, reply_to: &Subject) -> Vec<u8> {
    codec.encode(black_box(&Request {
        id,
        agent: "choria_provision",
        filter_agent: "choria_provision",
        body,
        ttl_secs: 60,
        unix_nanos: NOW * 1_000_000_000,
        reply_to,
        broker_url: "nats://broker.example.net:4222",
    }))
}
