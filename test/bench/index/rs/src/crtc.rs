//! Dynamo's index of production, ConcurrentRadixTreeCompressed, with the writer thread that it needs.

use crate::cpu_ns;
use crate::replay::Index;
use crate::workload::{FIND, LOAD, MIXED, Operation, Workload};
use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::*;
use std::future::Future;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

type Error = Box<dyn std::error::Error>;

pub struct Crtc {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
}

impl Crtc {
    pub fn new() -> Crtc {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, receiver) = flume::unbounded();
        let shared = tree.clone();
        thread::spawn(move || shared.worker(receiver, None).expect("the writer thread"));
        Crtc { tree, tasks }
    }

    /// Makes the writer thread run `then` when it has done everything before.
    ///
    /// It answers a Flush through a channel, and a sender wakes the receiver of its channel: a waker of our own runs on
    /// the writer's thread, where alone its CPU time can be read.
    fn when_reached(&self, then: impl Fn() + Send + Sync + 'static) {
        let (sender, receiver) = oneshot::channel();
        let waker: Waker = Arc::new(Then(then)).into();
        let mut receiver = Box::pin(receiver);
        let polled = receiver.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(matches!(polled, Poll::Pending));
        // It must outlive the answer: a channel without a receiver wakes no task.
        std::mem::forget(receiver);
        self.tasks.send(WorkerTask::Flush(sender)).expect("the writer thread");
    }

    fn wait(&self) {
        let reached = Arc::new(Signal::default());
        let signal = reached.clone();
        self.when_reached(move || signal.set(0));
        reached.wait();
    }
}

struct Then<F>(F);

impl<F: Fn() + Send + Sync> Wake for Then<F> {
    fn wake(self: Arc<Self>) {
        (self.0)()
    }
}

/// A number that one thread sets and another waits for.
#[derive(Default)]
struct Signal(Mutex<Option<u64>>, Condvar);

impl Signal {
    fn set(&self, value: u64) {
        *self.0.lock().unwrap() = Some(value);
        self.1.notify_all();
    }

    fn wait(&self) -> u64 {
        let guard = self.1.wait_while(self.0.lock().unwrap(), |value| value.is_none()).unwrap();
        guard.unwrap()
    }
}

impl Index for Crtc {
    /// Times the writer thread. It is stopped while the events are queued, so that it never waits for one.
    fn apply(&mut self, events: Vec<RouterEvent>) -> u64 {
        let (queued, start, end) = (Arc::new(Signal::default()), Arc::new(Signal::default()), Arc::new(Signal::default()));
        let (gate, begun) = (queued.clone(), start.clone());
        self.when_reached(move || {
            gate.wait();
            begun.set(cpu_ns());
        });
        for event in events {
            self.tasks.send(WorkerTask::Event(event)).expect("the writer thread");
        }
        let ended = end.clone();
        self.when_reached(move || ended.set(cpu_ns()));
        queued.set(0);
        let end = end.wait();
        end - start.wait()
    }

    fn find(&self, query: &[LocalBlockHash]) -> OverlapScores {
        self.tree.find_matches(query, false)
    }
}

impl Drop for Crtc {
    fn drop(&mut self) {
        let _ = self.tasks.send(WorkerTask::Terminate);
    }
}

/// A loaded index and what to ask it.
pub struct Readers {
    index: Crtc,
    queries: Arc<Vec<Vec<LocalBlockHash>>>,
    stores: Vec<(RouterEvent, usize)>,
}

/// How long readers read, at least. They are timed by the CPU time of their threads.
const READ_FOR: Duration = Duration::from_millis(700);

impl Readers {
    pub fn open(path: &str) -> Result<Readers, Error> {
        let mut index = Crtc::new();
        let (mut id, mut load, mut queries, mut stores) = (LOAD, Vec::new(), Vec::new(), Vec::new());
        for operation in Workload::open(path)? {
            match operation {
                Operation::Phase(next) => id = next,
                Operation::Store(event, _) if id == LOAD => load.push(event),
                Operation::Store(event, n) if id == MIXED => stores.push((event, n)),
                Operation::Query(query) if id == FIND => queries.push(query),
                _ => {}
            }
        }
        index.apply(load);
        Ok(Readers { index, queries: Arc::new(queries), stores })
    }

    /// Asks until it is told to stop, and returns the CPU time of a query.
    fn reader(&self, from: usize, stop: &Arc<AtomicBool>) -> thread::JoinHandle<f64> {
        let (tree, queries, stop) = (self.index.tree.clone(), self.queries.clone(), stop.clone());
        thread::spawn(move || {
            let (mut n, start) = (0, cpu_ns());
            while !stop.load(Ordering::Relaxed) {
                black_box(tree.find_matches(&queries[(from + n) % queries.len()], false));
                n += 1;
            }
            (cpu_ns() - start) as f64 / n as f64
        })
    }

    pub fn read(&self, threads: usize) -> String {
        let stop = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..threads).map(|i| self.reader(i * 7919, &stop)).collect();
        thread::sleep(READ_FOR);
        stop.store(true, Ordering::Relaxed);
        let took: f64 = readers.into_iter().map(|r| r.join().expect("a reader")).sum();
        format!(r#"{{"find_ns": {}}}"#, took / threads as f64)
    }

    /// One reader, while the writer thread applies so many blocks a second, if it can: what phase MIXED stores, then its
    /// removal, and again.
    pub fn beside_writer(&mut self, rate: f64) -> String {
        let stop = Arc::new(AtomicBool::new(false));
        let reader = self.reader(0, &stop);
        let rate = self.apply(rate);
        stop.store(true, Ordering::Relaxed);
        format!(r#"{{"find_ns": {}, "rate": {rate}}}"#, reader.join().expect("a reader"))
    }

    /// The same without a reader.
    pub fn write(&mut self, rate: f64) -> String {
        format!(r#"{{"find_ns": 0, "rate": {}}}"#, self.apply(rate))
    }

    fn apply(&mut self, rate: f64) -> f64 {
        let removes: Vec<_> = self.stores.iter().rev().map(|(event, n)| (removal(event), *n)).collect();
        let (start, mut blocks) = (Instant::now(), 0);
        while start.elapsed() < READ_FOR {
            for (i, (event, n)) in self.stores.iter().chain(&removes).enumerate() {
                self.index.tasks.send(WorkerTask::Event(event.clone())).expect("the writer thread");
                blocks += n;
                if i % 64 == 0 {
                    let due = Duration::from_secs_f64(blocks as f64 / rate);
                    if let Some(early) = due.checked_sub(start.elapsed()) {
                        thread::sleep(early);
                    }
                    // No more than a few events wait, so that what was sent was also applied.
                    while self.index.tasks.len() > 1024 {
                        thread::yield_now();
                    }
                }
            }
        }
        self.index.wait();
        blocks as f64 / start.elapsed().as_secs_f64()
    }
}

fn removal(store: &RouterEvent) -> RouterEvent {
    let KvCacheEventData::Stored(stored) = &store.event.data else { unreachable!("only stores are kept") };
    let block_hashes = stored.blocks.iter().map(|b| b.block_hash).collect();
    let data = KvCacheEventData::Removed(KvCacheRemoveData { block_hashes });
    RouterEvent::new(store.worker_id, KvCacheEvent { event_id: store.event.event_id, data, dp_rank: 0 })
}
