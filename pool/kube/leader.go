package kube

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// Times of a lease. A leader that cannot renew the lease stops leading after renewDeadline, and then tries to release
// it for the same time. Both together are shorter than leaseDuration, after which another replica may take the lease.
//
// They are half of the defaults of Kubernetes' own programs. An early replacement costs little here: the old leader
// continues until it sees the new one, and meanwhile both serve.
const (
	leaseDuration = 8 * time.Second
	renewDeadline = 3500 * time.Millisecond
	retryPeriod   = time.Second
)

// Election chooses one replica among several. Create it with NewElection.
type Election struct {
	config leaderelection.LeaderElectionConfig
	// A second lock for Succeeded, beside Run's: a lock keeps what it read last, and only one goroutine may use it.
	observer resourcelock.Interface
	lead     func(bool)
	kind     *Kind
	log      *slog.Logger
}

// NewElection returns a candidate for a Lease. The Lease is created if it does not exist. identity names this replica
// and must be unique. A replica that restarts with the same identity leads again at once if it led before. lead is
// called with true when this replica becomes the leader and with false when it stops leading, one call at a time.
//
// A leader that cannot renew the Lease continues until it sees another leader. While the API server is away, no other
// replica can take over, and stopping would take kvepp down as well. The price: two replicas lead if only one of them
// has lost the API server.
func NewElection(c *Client, namespace, lease, identity string, lead func(bool), log *slog.Logger) (*Election, error) {
	e := &Election{lead: lead, kind: newKind("leases", log), log: log}
	var locks [2]observedLock
	for i := range locks {
		lock, err := resourcelock.New(resourcelock.LeasesResourceLock, namespace, lease, c.core.CoreV1(),
			c.core.CoordinationV1(), resourcelock.ResourceLockConfig{Identity: identity})
		if err != nil {
			return nil, fmt.Errorf("kube: leader election: %w", err)
		}
		locks[i] = observedLock{lock, e.kind}
	}
	e.observer = locks[1]
	e.config = leaderelection.LeaderElectionConfig{
		Lock: locks[0], LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: retryPeriod,
		ReleaseOnCancel: true, Name: lease,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(context.Context) {},
			OnStoppedLeading: func() {},
		},
	}
	if _, err := leaderelection.NewLeaderElector(e.config); err != nil {
		return nil, fmt.Errorf("kube: leader election: %w", err)
	}
	return e, nil
}

// Run takes part until ctx ends. It then releases the lease, so that another replica gets it at once, and returns.
func (e *Election) Run(ctx context.Context) {
	var mu sync.Mutex
	leads := false // guarded by mu
	set := func(now bool) {
		if now != leads {
			leads = now
			e.lead(now)
		}
	}
	for {
		var elector *leaderelection.LeaderElector
		over := false // guarded by mu
		config := e.config
		// client-go calls this in a new goroutine for each leader that it sees. The call may come late, or after the
		// next leader's.
		config.Callbacks.OnNewLeader = func(leader string) {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case over || leader == "" || elector.GetLeader() != leader:
			case leader == config.Lock.Identity():
				e.log.Info("this replica leads", "lease", config.Name)
				set(true)
			default:
				e.log.Info("another replica leads", "leader", leader, "lease", config.Name)
				set(false)
			}
		}
		var err error
		if elector, err = leaderelection.NewLeaderElector(config); err != nil { // NewElection has checked the config
			e.log.Error("leader election", "error", err)
			return
		}
		elector.Run(ctx) // until the lease is lost or released
		mu.Lock()
		over = true
		if ctx.Err() != nil {
			set(false)
		} else if leads {
			e.log.Warn("the Lease could not be renewed in time; this replica leads until it sees another leader",
				"lease", config.Name)
		}
		mu.Unlock()
		if !pause(ctx, retryPeriod) {
			mu.Lock()
			set(false)
			mu.Unlock()
			return
		}
	}
}

// Succeeded waits, after Run's ctx has ended, until another replica leads. It returns false if ctx ends first.
func (e *Election) Succeeded(ctx context.Context) bool {
	for {
		within, cancel := context.WithTimeout(ctx, renewDeadline)
		record, _, err := e.observer.Get(within)
		cancel()
		if err == nil && record.HolderIdentity != "" && record.HolderIdentity != e.observer.Identity() {
			return true
		}
		if !pause(ctx, retryPeriod/4) {
			return false
		}
	}
}

// Kind returns the health of the Lease.
func (e *Election) Kind() *Kind { return e.kind }

// observedLock is a lock that counts its failures and logs each new one once.
type observedLock struct {
	resourcelock.Interface
	kind *Kind
}

func (o observedLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := o.Interface.Get(ctx)
	return record, raw, o.record(ctx, err)
}

func (o observedLock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return o.record(ctx, o.Interface.Create(ctx, r))
}

func (o observedLock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return o.record(ctx, o.Interface.Update(ctx, r))
}

func (o observedLock) record(ctx context.Context, err error) error {
	switch {
	case err == nil:
		o.kind.followed()
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) ||
		ctx.Err() != nil: // not created yet, or another replica was a moment faster
	default:
		o.kind.failed(err)
	}
	return err
}
