//! Whose each node is, where several provision side by side.
//!
//! Everybody reckons alike: a node belongs to whoever has the highest digest together with it. So all shares are equal, and
//! when somebody comes or goes no node changes hands but those that it takes or leaves.

use openssl::sha::Sha256;
use parking_lot::RwLock;

use crate::protocol::{Identity, Sender};

/// Who shares the nodes, as all threads see it that come upon one.
#[derive(Debug, Default)]
pub struct Shares(RwLock<Option<Owners>>);

impl Shares {
    /// From now on these share.
    pub fn put(&self, owners: Owners) {
        *self.0.write() = Some(owners);
    }

    /// Who else provisions a node; nobody as long as no one shares.
    pub fn other_owner(&self, node: &Identity) -> Option<Sender> {
        self.0.read().as_ref()?.other_owner(node).cloned()
    }

    /// Whether a node is ours.
    pub fn is_ours(&self, node: &Identity) -> bool {
        self.0.read().as_ref().is_none_or(|owners| owners.is_ours(node))
    }
}

/// Who shares the nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owners {
    us: Claim,
    others: Vec<Claim>,
}

impl Owners {
    /// We do, with these.
    pub fn new<'a>(us: &Sender, others: impl IntoIterator<Item = &'a Sender>) -> Owners {
        Owners { us: Claim::new(us), others: others.into_iter().map(Claim::new).collect() }
    }

    /// How many there are, with us.
    pub fn count(&self) -> usize {
        self.others.len() + 1
    }

    /// Whether a node is ours.
    pub fn is_ours(&self, node: &Identity) -> bool {
        let ours = self.us.digest(node);
        self.others.iter().all(|other| other.digest(node) < ours)
    }

    /// Who has a node, if not we.
    fn other_owner(&self, node: &Identity) -> Option<&Sender> {
        let highest = self.others.iter().max_by_key(|other| other.digest(node))?;
        (highest.digest(node) >= self.us.digest(node)).then_some(&highest.sender)
    }
}

/// Somebody's claim to nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Claim {
    sender: Sender,
    /// What every digest begins with.
    prefix: Vec<u8>,
}

impl Claim {
    fn new(sender: &Sender) -> Claim {
        let Sender { identity, caller } = sender;
        // None of them holds a NUL, so no two pairs look alike.
        let prefix = format!("{caller}\0{identity}\0").into_bytes();
        Claim { sender: sender.clone(), prefix }
    }

    fn digest(&self, node: &Identity) -> [u8; 32] {
        let mut digest = Sha256::new();
        digest.update(&self.prefix);
        digest.update(node.as_str().as_bytes());
        digest.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::peers::table::testing::sender;

    fn node(number: usize) -> Identity {
        Identity::parse(&format!("n{number}.example.net")).unwrap()
    }

    fn owners(us: &str, others: &[&str]) -> Owners {
        let others: Vec<Sender> = others.iter().map(|name| sender(name)).collect();
        Owners::new(&sender(us), &others)
    }

    #[test]
    fn the_digest_is_that_of_caller_identity_and_node() {
        let claim = Claim::new(&sender("p1"));
        let whole = openssl::sha::sha256(b"choria=p1\0p1.example.net\0n7.example.net");
        assert_eq!(claim.digest(&node(7)), whole);
    }

    #[test]
    fn each_node_is_exactly_ones_and_all_know_whose() {
        let names = ["a", "b", "c"];
        let views = [0, 1, 2].map(|us: usize| {
            let others: Vec<&str> = names.iter().copied().filter(|n| *n != names[us]).collect();
            owners(names[us], &others)
        });
        let mut shares = [0; 3];
        for number in 0..3_000 {
            let node = node(number);
            let owner: Vec<usize> = (0..3).filter(|us| views[*us].is_ours(&node)).collect();
            let [owner] = owner[..] else { panic!("{node} is of {owner:?}") };
            shares[owner] += 1;
            for (us, view) in views.iter().enumerate() {
                let expected = (us != owner).then(|| sender(names[owner]));
                assert_eq!(view.other_owner(&node), expected.as_ref());
            }
        }
        assert!(shares.iter().all(|share| (900..1_100).contains(share)), "{shares:?}");
    }

    #[test]
    fn whoever_joins_takes_from_all_and_moves_nothing_else() {
        let (before, after) = (owners("a", &["b"]), owners("a", &["b", "c"]));
        let newcomer = owners("c", &["a", "b"]);
        for number in 0..1_000 {
            let node = node(number);
            let (was, is) = (before.is_ours(&node), after.is_ours(&node));
            assert!(is == was || was && newcomer.is_ours(&node), "{node}");
        }
    }

    #[test]
    fn everything_is_ours_as_long_as_nobody_shares() {
        let shares = Shares::default();
        assert!(shares.is_ours(&node(1)) && shares.other_owner(&node(1)).is_none());
        shares.put(owners("a", &[]));
        assert!(shares.is_ours(&node(1)) && shares.other_owner(&node(1)).is_none());
        shares.put(owners("a", &["b"]));
        let of_b = (0..).map(node).find(|node| !shares.is_ours(node)).unwrap();
        assert_eq!(shares.other_owner(&of_b), Some(sender("b")));
    }
}
