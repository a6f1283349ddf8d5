//! Certificates: PEM text, and the requests nodes make for them.

pub mod csr;
pub mod pem;
