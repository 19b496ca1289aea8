//! Runs a whole workload on a new index and keeps the time of each phase.

use crate::cpu_ns;
use crate::workload::{LOAD, MIXED, MIXED_WINDOW, Operation, Workload};
use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::*;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::io;

pub trait Index {
    /// Applies events, and returns the CPU time that took.
    fn apply(&mut self, events: Vec<RouterEvent>) -> u64;
    fn find(&self, query: &[LocalBlockHash]) -> OverlapScores;
}

impl Index for RadixTree {
    fn apply(&mut self, events: Vec<RouterEvent>) -> u64 {
        let start = cpu_ns();
        for event in events {
            self.apply_event(event).expect("an event that was refused");
        }
        cpu_ns() - start
    }

    // It wants a copy of the hashes of its own, so that making one is a part of asking.
    fn find(&self, query: &[LocalBlockHash]) -> OverlapScores {
        self.find_matches(query.to_vec(), false)
    }
}

fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
    z ^ (z >> 31)
}

/// Equal for equal answers, in any order of the workers.
fn digest(scores: &OverlapScores) -> u64 {
    let held = scores.scores.iter().filter(|(_, blocks)| **blocks > 0);
    held.fold(0, |sum, (w, blocks)| sum.wrapping_add(mixed((w.worker_id + 1) << 32 | *blocks as u64)))
}

/// What one phase took.
#[derive(Default)]
struct Phase {
    store_ns: u64,
    stored: usize,
    remove_ns: u64,
    removed: usize,
    find_ns: u64,
    queries: usize,
    queried: usize,
    digest: u64,
}

/// Events of one kind that wait to be applied together, and queries that wait.
#[derive(Default)]
struct Waiting {
    storing: bool,
    blocks: usize,
    events: Vec<RouterEvent>,
    queries: Vec<Vec<LocalBlockHash>>,
}

impl Waiting {
    fn apply(&mut self, index: &mut impl Index, phase: &mut Phase) {
        if self.events.is_empty() {
            return;
        }
        let took = index.apply(std::mem::take(&mut self.events));
        if self.storing {
            phase.store_ns += took;
            phase.stored += self.blocks;
        } else {
            phase.remove_ns += took;
            phase.removed += self.blocks;
        }
        self.blocks = 0;
    }

    /// Answers the queries: once for time, and once more for the digest.
    fn answer(&mut self, index: &impl Index, phase: &mut Phase) {
        if self.queries.is_empty() {
            return;
        }
        let start = cpu_ns();
        for query in &self.queries {
            black_box(index.find(query));
        }
        phase.find_ns += cpu_ns() - start;
        for query in self.queries.drain(..) {
            phase.digest = phase.digest.wrapping_add(digest(&index.find(&query)));
            phase.queries += 1;
            phase.queried += query.len();
        }
    }
}

/// Enough events to time together, and few enough to hold in memory.
const BATCH: usize = 50_000;

pub fn run(path: &str, mut index: impl Index) -> io::Result<String> {
    let mut phases: BTreeMap<u64, Phase> = BTreeMap::new();
    let (mut id, mut window) = (LOAD, 0);
    let mut waiting = Waiting::default();
    for operation in Workload::open(path)? {
        let phase = phases.entry(id).or_default();
        let storing = matches!(operation, Operation::Store(..));
        match operation {
            Operation::Phase(next) => {
                waiting.apply(&mut index, phase);
                waiting.answer(&index, phase);
                (id, window) = (next, 0);
                continue;
            }
            Operation::Query(query) => {
                if id != MIXED {
                    waiting.apply(&mut index, phase);
                }
                waiting.queries.push(query);
                if id != MIXED && waiting.queries.len() == 4096 {
                    waiting.answer(&index, phase);
                }
            }
            Operation::Store(event, n) | Operation::Remove(event, n) => {
                if id != MIXED {
                    waiting.answer(&index, phase);
                }
                if storing != waiting.storing || waiting.events.len() == BATCH {
                    waiting.apply(&mut index, phase);
                }
                waiting.storing = storing;
                waiting.blocks += n;
                waiting.events.push(event);
            }
        }
        if id == MIXED {
            window += 1;
            if window == MIXED_WINDOW {
                waiting.apply(&mut index, phase);
                waiting.answer(&index, phase);
                window = 0;
            }
        }
    }
    let phase = phases.entry(id).or_default();
    waiting.apply(&mut index, phase);
    waiting.answer(&index, phase);
    let json = phases.iter().map(|(id, p)| {
        format!(
            r#""{id}": {{"store_ns": {}, "stored": {}, "remove_ns": {}, "removed": {}, "find_ns": {}, "queries": {}, "queried": {}, "digest": "{:016x}"}}"#,
            p.store_ns, p.stored, p.remove_ns, p.removed, p.find_ns, p.queries, p.queried, p.digest
        )
    });
    Ok(format!("{{{}}}", json.collect::<Vec<_>>().join(", ")))
}

/// Loads the first phase and says what that takes: entries, bytes allocated, bytes in RAM.
pub fn memory(path: &str, mut index: impl Index) -> io::Result<String> {
    let mut workload = Workload::open(path)?;
    let (live, resident) = in_use()?;
    let (mut entries, mut events) = (0, Vec::new());
    for operation in workload.by_ref() {
        match operation {
            Operation::Store(event, n) => {
                entries += n;
                events.push(event);
            }
            Operation::Phase(LOAD) => {}
            _ => break,
        }
        if events.len() == 4096 {
            index.apply(std::mem::take(&mut events));
        }
    }
    index.apply(events);
    let (live_after, resident_after) = in_use()?;
    drop(workload); // in use both times
    Ok(format!(r#"{{"entries": {entries}, "live": {}, "resident": {}}}"#, live_after - live, resident_after - resident))
}

/// Bytes that malloc has given out, and bytes in RAM that no file backs.
fn in_use() -> io::Result<(i64, i64)> {
    let m = unsafe {
        libc::malloc_trim(0);
        libc::mallinfo2()
    };
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kib = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.split_whitespace().next()?.parse::<i64>().ok());
    let kib = kib.ok_or_else(|| io::Error::other("no RssAnon in /proc/self/status"))?;
    Ok(((m.uordblks + m.hblkhd) as i64, kib << 10))
}
