//! Reads workload files; ../index-go/workload.go describes them.

use dynamo_kv_router::protocols::*;
use std::io;

pub const LOAD: u64 = 0;
pub const FIND: u64 = 1;
pub const MIXED: u64 = 2;

/// Operations of phase MIXED are taken in windows of this many, events first and queries after.
pub const MIXED_WINDOW: usize = 256;

pub enum Operation {
    Store(RouterEvent, usize),
    Remove(RouterEvent, usize),
    Query(Vec<LocalBlockHash>),
    Phase(u64),
}

pub struct Workload {
    words: Vec<u64>,
    at: usize,
    events: u64,
}

impl Workload {
    pub fn open(path: &str) -> io::Result<Workload> {
        let raw = std::fs::read(path)?;
        let words: Vec<u64> = raw.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap())).collect();
        if words.first() != Some(&0x3130_776b_7070_6576) {
            return Err(io::Error::other(format!("{path}: not a workload of this machine")));
        }
        Ok(Workload { words, at: 2, events: 0 })
    }

    fn take(&mut self, n: usize) -> &[u64] {
        self.at += n;
        &self.words[self.at - n..self.at]
    }
}

impl Iterator for Workload {
    type Item = Operation;

    fn next(&mut self) -> Option<Operation> {
        let head = self.take(1)[0];
        let (worker, n) = (head >> 8 & 0xff_ffff, (head >> 32) as usize);
        self.events += 1;
        let event_id = self.events;
        let event = |data| RouterEvent::new(worker, KvCacheEvent { event_id, data, dp_rank: 0 });
        match head & 0xff {
            1 => {
                let parent = self.take(1)[0];
                let blocks = self
                    .take(2 * n)
                    .chunks_exact(2)
                    .map(|b| KvCacheStoredBlockData {
                        block_hash: ExternalSequenceBlockHash(b[0]),
                        tokens_hash: LocalBlockHash(b[1]),
                        mm_extra_info: None,
                    })
                    .collect();
                let parent_hash = (parent != 0).then_some(ExternalSequenceBlockHash(parent));
                Some(Operation::Store(event(KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position: None, blocks })), n))
            }
            2 => {
                let block_hashes = self.take(n).iter().map(|h| ExternalSequenceBlockHash(*h)).collect();
                Some(Operation::Remove(event(KvCacheEventData::Removed(KvCacheRemoveData { block_hashes })), n))
            }
            3 => Some(Operation::Query(self.take(n).iter().map(|h| LocalBlockHash(*h)).collect())),
            4 => Some(Operation::Phase(n as u64)),
            _ => None,
        }
    }
}
