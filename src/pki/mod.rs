//! Certificates: PEM text, the requests nodes make for them, our own, and private keys on their way to a node.

pub mod csr;
pub mod ecdh;
pub mod pem;
#[cfg(test)]
#[allow(dead_code, reason = "the practice fleet uses the rest")]
pub(crate) mod testing;
pub mod x509;
