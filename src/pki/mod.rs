//! Certificates: PEM text, the requests nodes make for them, and our own.

pub mod csr;
pub mod pem;
pub mod x509;
