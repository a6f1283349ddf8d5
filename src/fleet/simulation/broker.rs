//! Brokers that stop, start and lose each other, and the bucket with the election's key.

use fastrand::Rng;

use crate::fleet::election::core::Answer;
use crate::fleet::simulation::{Time, duration};

/// All of them. A client of one reaches the clients of every other that is up and not cut off.
#[derive(Debug)]
pub struct Brokers {
    pub is_up: Vec<bool>,
    pub cut_off: Option<usize>,
    pub bucket: Bucket,
}

/// The bucket as the broker keeps it that leads its stream.
#[derive(Debug, Clone, Copy)]
pub struct Bucket {
    pub exists: bool,
    /// Counts how often it was made anew.
    pub made: u32,
    pub at: usize,
    pub ttl: Time,
    pub last_number: u64,
    /// Number and time of writing.
    pub key: Option<(u64, Time)>,
}

/// What a candidate asks of the bucket.
#[derive(Debug, Clone, Copy)]
pub enum Request {
    Status,
    Write { expected: u64 },
}

impl Brokers {
    pub fn new(count: usize, ttl: Time, exists: bool) -> Brokers {
        Brokers { is_up: vec![true; count], cut_off: None, bucket: Bucket::new(ttl, exists) }
    }

    pub fn reaches(&self, from: usize, to: usize) -> bool {
        let is_cut = from != to && self.cut_off.is_some_and(|cut| cut == from || cut == to);
        self.is_up[from] && self.is_up[to] && !is_cut
    }

    /// One that a client finds, if any is up.
    pub fn any(&self, rng: &mut Rng) -> Option<usize> {
        let first = rng.usize(..self.is_up.len());
        (first..first + self.is_up.len()).map(|n| n % self.is_up.len()).find(|n| self.is_up[*n])
    }

    /// A broker stops. Where there are three, another one leads the stream from then on.
    pub fn stop(&mut self, broker: usize) {
        self.is_up[broker] = false;
        if let (true, Some(other)) = (self.is_up.len() >= 3, self.is_up.iter().position(|up| *up)) {
            self.bucket.at = if self.bucket.at == broker { other } else { self.bucket.at };
        }
    }
}

impl Bucket {
    pub fn new(ttl: Time, exists: bool) -> Bucket {
        Bucket { exists, made: 0, at: 0, ttl, last_number: 0, key: None }
    }

    /// Answers a request, or not at all.
    pub fn serve(
        &mut self,
        request: Request,
        now: Time,
        peace: bool,
        rng: &mut Rng,
    ) -> Option<Answer> {
        self.key = self.key.filter(|(_, written)| now < written + self.ttl);
        match request {
            Request::Status if self.exists => Some(Answer::Usable(duration(self.ttl))),
            Request::Status => Some(Answer::Unusable("stream not found".to_owned())),
            // Old brokers say nothing.
            Request::Write { .. } if !self.exists => rng.bool().then_some(Answer::NoResponders),
            Request::Write { .. } if !peace && rng.u16(..500) == 0 => {
                Some(Answer::Failed("temporarily unavailable".to_owned()))
            }
            Request::Write { expected } => {
                let number = self.key.map_or(0, |(number, _)| number);
                if expected != number {
                    return Some(Answer::Contended(format!("wrong last sequence: {number}")));
                }
                Some(Answer::Stored(self.write(now)))
            }
        }
    }

    /// Writes the key, whoever it is.
    pub fn write(&mut self, now: Time) -> u64 {
        self.last_number += 1;
        self.key = Some((self.last_number, now));
        self.last_number
    }

    /// Made anew, or from a copy that is not quite new: old numbers mean other keys.
    pub fn comes(&mut self, rng: &mut Rng) {
        if !self.exists {
            let former = self.last_number.saturating_sub(rng.u64(..12));
            let last_number = if rng.bool() { 0 } else { former };
            *self = Bucket { exists: true, made: self.made + 1, last_number, key: None, ..*self };
        }
    }
}
